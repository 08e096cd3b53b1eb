from studies.projection.study import main

main()
