"""`python -m ep.export`: an exchange as a library and a header of C, without Python."""
