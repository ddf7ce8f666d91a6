"""Comparisons that anybody can run again; no absolute promise is made here."""
