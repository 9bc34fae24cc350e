"""The places where users already have their models. Each module imports its library when it is imported."""
