"""Word lists of our own that tasks draw from; every word is there once."""

from __future__ import annotations

PEOPLE = (
    "Agnes", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Irina", "Jonas",
    "Katya", "Leo", "Marta", "Nils", "Olga", "Pavel", "Quentin", "Rosa", "Stefan", "Tamara",
    "Ulrich", "Vera", "Walter", "Yvonne", "Zeno",
)  # fmt: skip
TOWNS = (
    "Ashford", "Brenna", "Colmar", "Dunmore", "Eastvale", "Fenwick", "Glenrock", "Hartwell",
    "Ilmen", "Jarrow", "Kirkby", "Lowick", "Millbrook", "Northam", "Oakley", "Penrith",
)  # fmt: skip
THINGS = (
    "apple", "basket", "candle", "desk", "engine", "feather", "guitar", "hammer", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quilt", "rocket",
    "saddle", "table", "umbrella", "violin", "window", "yacht", "zebra", "anchor", "bridge",
    "carpet", "dragon", "eagle", "forest", "garden", "helmet", "jungle", "kitten", "lemon",
    "magnet", "napkin", "ocean", "parrot", "queen", "ribbon", "spoon", "tiger", "valley",
    "whistle", "button", "camera", "dolphin", "flute", "glove", "honey", "iron", "jewel",
    "lantern", "marble", "nest", "onion", "piano", "rabbit", "shovel", "towel", "vase", "wagon",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "brown", "white")
WEATHER = ("rain", "fog", "sunshine", "snow", "strong wind", "light frost", "thunder", "haze")
DOINGS = (
    "walked along the canal", "repaired an old clock", "bought bread at the market",
    "wrote a long letter", "painted the garden fence", "waited for the evening train",
    "cooked soup for the neighbours", "read a book about birds", "cleaned the attic",
    "planted beans behind the house", "carried wood to the barn", "listened to the radio",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
    "Germany": "Berlin", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
}  # fmt: skip
