"""How a source's samples are arranged over its blocks. `registry` lists the orders; importing it imports none of them."""
