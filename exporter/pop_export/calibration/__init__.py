"""Measure how much each decoder layer matters, per stage: text in `corpus`, gates in `gates`, the result in `record`."""
