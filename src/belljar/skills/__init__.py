"""Skills: folders of the open Agent Skills format that sessions read and import, and that clients are served."""
