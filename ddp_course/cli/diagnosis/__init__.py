"""`ddp-course diagnose`: from the text of an error to the page that explains it."""
