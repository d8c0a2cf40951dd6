"""Joins the floors: the only place that sees concrete classes of every room, and what each process of the service is
made of."""
