"""What the tests stand on: tiny models, tokenizers, templates, oracles and forced replies."""
