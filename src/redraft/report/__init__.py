"""Tables, plots and the verdict."""
