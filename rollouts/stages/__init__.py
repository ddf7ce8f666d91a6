"""The work of the three stages: between a claim and its finish."""
