"""Megabytes that a card sends in one step: DataParallel's main card against a ring."""

megabytes = 100  # the gradients, and the parameters, of 25 million float32 numbers
print("cards   main card sends   main card receives   each card of a ring sends")
for cards in (2, 3, 4, 8, 16):
    copies = (cards - 1) * megabytes  # parameters to every other card; gradients from every other card
    ring = 2 * (cards - 1) / cards * megabytes
    print(f"{cards:5}   {copies:15}   {copies:18}   {ring:25.1f}")
