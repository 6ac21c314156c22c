"""Several machines inside one, and how programs are started on them."""
