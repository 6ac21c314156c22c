"""Tools that say what went wrong in a job, each one file to copy."""
