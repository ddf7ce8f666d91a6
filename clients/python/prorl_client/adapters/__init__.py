"""Trajectories in the forms that trainers take; each module needs its trainer only when used."""
