"""Reading what was written for the existing verl: launch scripts, YAML files, Python files."""
