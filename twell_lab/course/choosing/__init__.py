"""The notebook on choosing a path: methods that skip silent neurons or tokens, and which is fastest where."""
