"""What a terminal shows: escaped text, boxes, pages, words."""
