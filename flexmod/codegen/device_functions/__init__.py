"""Functions that run on a device: tests import them, generated modules contain their text."""
