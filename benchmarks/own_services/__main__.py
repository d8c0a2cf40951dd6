"""Answers of services of `--service`, parsed in every language, and what their calls cost.

python -m benchmarks.own_services.answers
python -m benchmarks.own_services.overhead
"""

print(__doc__)
