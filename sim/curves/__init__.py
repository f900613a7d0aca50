"""Exact hit curves and GPU × host surfaces over request traces (numpy; numba when present)."""
