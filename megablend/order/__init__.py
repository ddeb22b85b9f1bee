"""The orders in which a source's blocks or documents are read.
`registry` lists the orders without importing them."""
