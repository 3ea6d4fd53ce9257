"""Errors, files and folders, and what this machine is. Imports nothing of the package."""
