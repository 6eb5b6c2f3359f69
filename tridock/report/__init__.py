"""What a run left behind, for people: a table and a picture. No torch here."""
