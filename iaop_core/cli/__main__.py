from iaop_core.cli import main

main(prog_name="iaop")
