"""Connects flexmod to other libraries of models. Importing a module here imports its library."""
