"""Matrix products with weights, with the operations fused before and after them."""
