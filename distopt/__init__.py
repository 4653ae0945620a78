"""distopt"""
