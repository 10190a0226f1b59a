"""Families in which some layers have another mixer than attention, or layers are of several kinds."""
