"""From ids to text, answers, stop strings and log-probabilities."""
