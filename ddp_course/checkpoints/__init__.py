"""The files of a run: written whole, read as data, checked before they are used."""
