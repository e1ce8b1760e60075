"""Measure how much each decoder layer matters in each stage, on text."""
