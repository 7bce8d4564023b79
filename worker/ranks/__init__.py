"""The processes of a tensor-, expert- or data-parallel worker, and what crosses between them."""
