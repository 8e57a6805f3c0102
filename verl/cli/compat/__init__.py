"""Reading of files written for the existing verl: launch scripts, YAML files, Python files."""
