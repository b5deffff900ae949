"""The verbs of the command line, one module each; they parse flags, call `planner.api` or a library module, and print."""
