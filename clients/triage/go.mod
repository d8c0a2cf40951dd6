module triage

go 1.24
