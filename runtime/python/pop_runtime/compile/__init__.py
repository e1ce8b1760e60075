"""`pop-compile`: make engines of a bundle on the machine that will run them."""
