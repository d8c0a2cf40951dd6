"""Who gets time and memory in the next step."""
