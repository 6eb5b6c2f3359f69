"""The results of a run for the user: a table and a picture. No torch here."""
