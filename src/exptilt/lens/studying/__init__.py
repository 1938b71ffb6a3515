"""A study: all measures of a model on texts, with errors, kept, summed up and written out."""
