"""The state of an HTTP call: its body, events, errors and end."""
