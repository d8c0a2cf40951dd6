"""Layers split over several ranks. A group of one holds everything and adds nothing to the computation."""
