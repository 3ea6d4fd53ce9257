"""Plotly figures (figures) from plain data (data). May import formats and core."""
