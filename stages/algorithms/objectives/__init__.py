"""What is trained: an objective turns a network's outputs on a micro-batch into a Loss. One file each; one trainer for all."""
