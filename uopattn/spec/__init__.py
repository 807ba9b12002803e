"""The description of one attention: checked arguments, and traced mods."""
