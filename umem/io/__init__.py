"""Reading and writing files: whole files, columns, and YAML with the place of each key."""
