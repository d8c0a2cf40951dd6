"""The command line: one file a verb, run in the terminal."""
