"""Speed of every op and of whole steps, as a share of what this card can do."""
