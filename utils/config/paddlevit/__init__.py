"""PaddleViT's other model families, which timm has: their names, sizes and defaults. Imported only for such a TYPE."""
