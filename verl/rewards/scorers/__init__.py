"""Built-in scorers, one file per kind of answer; `route` says which data_source goes to which."""
