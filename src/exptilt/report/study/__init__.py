"""The page of a study: `sentences` from its numbers, the `payload` of the scripts, the `page` with both."""
