"""Predicts larger worlds from one device, the collectives alone, and a stated interconnect. See docs/scale.md."""
