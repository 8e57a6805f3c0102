"""SGLang as far as verl starts it, for tests that put this folder on the path."""
