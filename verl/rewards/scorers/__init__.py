"""Built-in scorers, one file per kind of answer; `route` maps each data_source to its scorer."""
