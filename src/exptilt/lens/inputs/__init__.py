"""What models read, cut into the parts that they read at once: texts, pictures, sounds."""
